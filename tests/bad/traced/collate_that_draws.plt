import "../base/own.plt"

model {
  network = python("structures:Beside")
  loss    = python("structures:distance")
}

data {
  source     = python("structures:Pairs")
  collate    = python("structures:noisy") #! W0440
  validation = 25%
}
