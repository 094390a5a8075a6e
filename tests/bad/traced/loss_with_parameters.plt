import "../base/digits.plt"

model {
  loss = python("loss_state:tempered") #! E0660
}
