import "../base/own.plt"

model {
  network = python("sequences:Model", kind = "mask")
}

parallelism {
  context = 2 #! E0441
}
