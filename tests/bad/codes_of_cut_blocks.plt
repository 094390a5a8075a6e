import "base/digits.plt"

model {
  network = [flatten(), linear(100), relu(), linear(10)]
}

train {
  optimizer = adamw(state = 8bit)
}

devices {
  cpus = 2
}

parallelism {
  zero = 3 #! E0737
}
