import "../base/vectors.plt"

model {
  network = python("../../helpers/own_forward_passes:Untracked") #! E0643
}

data {
  validation = 25%
}
