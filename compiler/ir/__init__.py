"""The data types that pass between rooms and to the runtime, and the few rules that both follow."""
