import "../base/digits.plt"

model {
  loss = python("loss_state:centred") #! E0661
}
