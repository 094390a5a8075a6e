import "../base/own.plt"

model {
  network = python("sequences:Counting")
}

devices {
  cpus = 4
}

parallelism {
  context      = 2 #! E0442
  pipeline     = 2
  microbatches = 2
}
