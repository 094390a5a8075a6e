import "../base/vectors.plt"

model {
  network = python("../../helpers/own_forward_passes:Writing")
}

parallelism {
  zero = 3 #! E0680
}
