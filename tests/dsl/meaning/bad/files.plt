import "base/god.plt" #! E0101
import "base/circle_a.plt"

model {
  network = mlp
  loss    = cross_entropy
  weights = "" #! E0135
}

data {
  source = python("module.function") #! E0135
  batch  = 8
}

train {
  steps     = 1
  optimizer = sgd
}

import "base/good.plt" #! E0103
