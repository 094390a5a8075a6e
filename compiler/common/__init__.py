"""The few rules that the compiler and the runtime follow alike, and the formats of numbers in their messages."""
