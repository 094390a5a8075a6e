import "base/digits.plt"

model {
  network = [flatten(), dropout(0.1), linear(10)] #! W0608
}

train {
  precision         = fp16 #! W0609
  dropout_generator = torch
}
