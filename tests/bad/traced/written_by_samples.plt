import "../base/vectors.plt"

model {
  network = python("../../helpers/own_forward_passes:Writing", how = "samples") #! E0680 W0642
}
