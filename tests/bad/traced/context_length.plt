import "../base/own.plt"

model {
  network = python("sequences:Model", kind = "length")
}

parallelism {
  context = 2 #! E0443
}
