import "base/digits.plt"

model { network = [flatten(), linear(10)] }
train { precision = fp8(emulate = true) } #! E0743
