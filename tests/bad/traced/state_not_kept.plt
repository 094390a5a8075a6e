import "../base/vectors.plt"

model {
  network = python("../../helpers/own_forward_passes:Carrying") #! W0646
}

