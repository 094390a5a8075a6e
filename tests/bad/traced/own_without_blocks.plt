import "../base/own.plt"

model {
  network = python("nets:network")
}

memory {
  recompute = full #! W0714
}
