import "../base/vectors.plt"

model {
  network = python("../../helpers/own_forward_passes:Moving", how = "most") #! W0437 W0642
}

