import "../base/vectors.plt"

model {
  network = python("../../helpers/own_forward_passes:Losing")
  loss    = own() #! W0625
}

data {
  source = python("../../helpers/own_forward_passes:Classes")
}
