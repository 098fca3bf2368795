"""A network of namespaces on one machine, and the processes that talk over it."""
