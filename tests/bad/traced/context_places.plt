import "../base/own.plt"

model {
  network = python("sequences:Counting")
}

parallelism {
  context = 2 #! E0442
}
