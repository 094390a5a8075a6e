import "base/gpt.plt"

model {
  network = [embedding(256, 32), relu(), relu(), linear(256)]
}

data {
  source = stdlib(context = 32)
}

devices {
  cpus = 3
}

parallelism {
  pipeline     = 3
  microbatches = 4
  stages       = [1, 2, 1] #! E0432
}
