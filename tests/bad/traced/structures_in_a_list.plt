import "../base/digits.plt"

model {
  network = [flatten(), linear(10)] #! E0321
  loss    = python("structures:mean")
}

data {
  source = python("structures:Pairs")
}
