"""The loops of handwritten.py as users of Accelerate, Lightning and DeepSpeed write them, one module for each tool."""
