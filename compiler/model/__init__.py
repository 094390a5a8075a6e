"""A network as layers with shapes, FLOPs and bytes."""
