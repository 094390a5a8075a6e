import "../base/digits.plt"

train {
  optimizer = python("optimizers:Noisy", lr = 0.1) #! E0615
  groups    = [group("1.bias", lr = 1e-2)] #! E0622
}
