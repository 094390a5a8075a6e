import "base/own.plt"

memory = auto #! W0494
