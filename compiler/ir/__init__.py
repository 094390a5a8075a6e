"""The data types that pass between rooms and to the runtime."""
