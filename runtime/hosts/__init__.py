"""Several hosts: how their launchers find each other, what they agree on, and how they stay together."""
