"""The links between the devices of one host: others' traffic, a sum's stages."""
