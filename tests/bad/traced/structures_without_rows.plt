import "../base/own.plt"

model {
  network = python("structures:Beside")
  loss    = python("structures:distance")
}

data {
  source  = python("structures:Pairs")
  collate = python("structures:per_batch")
}

parallelism {
  pipeline = 2 #! E0320
}
