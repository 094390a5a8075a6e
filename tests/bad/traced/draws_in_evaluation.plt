import "../base/vectors.plt"

model {
  network = python("../../helpers/own_forward_passes:Dropping") #! W0649
}
