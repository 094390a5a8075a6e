"""Rules for the network, its weights, its adapters and its loss."""
