param a = 1 param b = 2
param c = 1, param d = 2
