bubble < 2%
