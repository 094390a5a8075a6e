import "../base/digits.plt"

model {
  network = python("structures:Both")
  loss    = python("structures:summed")
}

data {
  source     = python("structures:Pairs")
  batch      = 8
  validation = 20%
}

evaluate {
  metrics = [loss, python("structures:errors")] #! E0802
}
