import "../base/vectors.plt"

model {
  network = python("../../helpers/own_forward_passes:blocks") #! W0641 W0646
}

memory {
  recompute = full #! E0641
}
