import "../base/own.plt"

model {
  network = python("structures:Both")
  loss    = cross_entropy() #! E0322
}

data {
  source     = python("structures:Pairs")
  validation = 25%
}

parallelism {
  context = 2 #! E0320
}

evaluate {
  metrics = [accuracy] #! E0323
}
