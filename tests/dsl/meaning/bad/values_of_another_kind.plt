import "base/good.plt"

data {
  batch      = 64.0 #! E0121
  validation = 20 #! E0125
  shuffle    = 1 #! E0121
  workers    = "4" #! E0121
  last_batch = "keep" #! E0121
}

train {
  seed      = true #! E0121
  clip      = 1GiB #! E0122
  no_decay  = "*.bias" #! E0121
  precision = fp16(2) #! E0121
  compile   = yes #! E0120
}

evaluate {
  every   = 5 #! E0124
  metrics = accuracy #! E0121
}

checkpoint {
  every = 5GiB #! E0122
  keep  = 0 #! E0125
}

memory {
  limit     = 76gb #! E0123
  recompute = full(2) #! E0121
}

parallelism {
  pipeline = 2
  schedule = 1f1c #! E0120
  stages   = [] #! E0136
}

launch {
  timeout = 10 #! E0124
}

devices {
  nodes = 4..1 #! E0137
}
