import "../base/vectors.plt"

model {
  network = python("../../helpers/own_forward_passes:LayerDrop")
}

parallelism {
  pipeline = 2 #! E0320
}
