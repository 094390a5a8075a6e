import "../base/vectors.plt"

model {
  network = python("../../helpers/own_forward_passes:Writing", how = "clamped")
}

parallelism {
  microbatches = 2 #! W0685
}
