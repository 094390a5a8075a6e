import "../base/vectors.plt"

model {
  network = python("../../helpers/own_forward_passes:Path", how = "secrets") #! W0641
}

