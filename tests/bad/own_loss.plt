import "base/digits.plt"

model {
  loss = own() #! E0324
}

data {
  collate = python("mine:padded") #! E0325
}
