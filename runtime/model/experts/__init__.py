"""Mixtures of experts: the router, the experts' grouped products, and the layer made of them."""
