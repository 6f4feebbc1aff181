"""What both fronts do with a reply, the gateway and Ray's: it outlives the server that it comes from."""
