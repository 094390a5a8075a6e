import "../base/vectors.plt"

model {
  network = python("../../helpers/own_forward_passes:Mixing", how = "attention") #! W0642 W0643
}

