"""Connections between ranks: how they find each other, and which objects they may send."""
