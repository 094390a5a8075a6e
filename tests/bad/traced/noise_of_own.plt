import "../base/vectors.plt"

model {
  network = python("../../helpers/own_forward_passes:PoissonNoise") #! W0608 W0649
}

