param width 256
