import "../base/own.plt"

model {
  network = python("sequences:Model", kind = "mean")
}

parallelism {
  context = 2 #! E0440
}
