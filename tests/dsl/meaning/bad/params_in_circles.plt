import "base/good.plt"

param width = 2 * inner #! E0128
param inner = width // 2
param depth #! E0129
param spare = 3 #! W0101
param full = selective #! W0102
param much = 10 ** 1000 #! E0126
param odd = 1 epoch + 10 steps #! E0127
param text = "a" + 1 #! E0127

train {
  seed = width + depth
}

memory {
  recompute = full
}

log {
  every = much * 1 step
}

evaluate {
  every = odd
}

checkpoint {
  every = text
}
