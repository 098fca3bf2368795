"""Traffic of others on the links between the devices of one host."""
