import "../base/vectors.plt"

model {
  network = python("../../helpers/own_forward_passes:PermutedSamples") #! W0608 W0642
}

