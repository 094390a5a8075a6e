"""What changes modules in place on one rank."""
