-- Opens a job in Neovim with the configuration of editors/neovim, asks for each feature as a user's keys do, and prints
-- what the editor has as JSON. Variables: DSLC_JOB, the file to open.
local result = {}

local function wait(what, done)
  if not vim.wait(60000, done, 20) then
    error("waited too long for " .. what)
  end
end

-- Asks the server as Neovim's own commands do, and returns its first result.
local function ask(method, params)
  local replies = vim.lsp.buf_request_sync(0, method, params, 60000)
  local _, reply = next(replies or {})
  return reply and reply.result
end

local function at(pattern)
  local line = vim.fn.search(pattern)
  assert(line > 0, "there is no " .. pattern)
  return vim.lsp.util.make_position_params(0, "utf-16")
end

local function run()
  vim.cmd.edit(vim.fn.fnameescape(vim.env.DSLC_JOB))
  result.filetype, result.commentstring = vim.bo.filetype, vim.bo.commentstring
  wait("the server", function() return #vim.lsp.get_clients({ bufnr = 0, name = "dslc" }) > 0 end)
  local client = vim.lsp.get_clients({ bufnr = 0, name = "dslc" })[1]
  wait("its answer", function() return client.initialized end)

  wait("a diagnostic", function() return #vim.diagnostic.get(0) > 0 end)
  local wrong = vim.diagnostic.get(0)[1]
  for _, space in pairs(vim.diagnostic.get_namespaces()) do
    for _, mark in ipairs(vim.api.nvim_buf_get_extmarks(0, space.user_data.underline_ns or -1, 0, -1, { details = true })) do
      result.underlined = { mark[4].hl_group, mark[2], mark[3], mark[4].end_col }
    end
  end
  result.diagnostic = { code = wrong.code, line = wrong.lnum, column = wrong.col, message = wrong.message }

  at("bach")
  vim.lsp.buf.code_action({ apply = true })
  wait("the fix", function() return vim.fn.search("batch", "nw") > 0 end)
  result.fixed = vim.api.nvim_get_current_line()
  wait("no diagnostic", function() return #vim.diagnostic.get(0) == 0 end)

  result.hover = ask("textDocument/hover", at("source")).contents.value
  wait("inlay hints", function() return #vim.lsp.inlay_hint.get({ bufnr = 0 }) > 0 end)
  result.hints = vim.tbl_map(function(hint)
    local label = hint.inlay_hint.label
    return type(label) == "string" and label or label[1].value
  end, vim.lsp.inlay_hint.get({ bufnr = 0 }))

  wait("semantic tokens", function()
    at("optimizer")
    return #(vim.lsp.semantic_tokens.get_at_pos() or {}) > 0
  end)
  result.token = vim.lsp.semantic_tokens.get_at_pos()[1].type

  at("rate")
  vim.lsp.buf.rename("speed")
  wait("the new name", function() return vim.fn.search("lr = speed", "nw") > 0 end)
  result.renamed = vim.fn.searchcount({ pattern = "speed", recompute = 1 }).total

  at("lr = speed")
  vim.cmd("normal! f=w")
  vim.lsp.buf.definition()
  wait("the definition", function() return vim.fn.line(".") == 1 end)
  result.definition = vim.api.nvim_get_current_line()

  vim.api.nvim_buf_set_lines(0, -1, -1, false, { "checkpoint {", "ev", "}" })
  vim.api.nvim_win_set_cursor(0, { vim.api.nvim_buf_line_count(0) - 1, 1 })
  result.omnifunc = vim.bo.omnifunc
  local list = ask("textDocument/completion", vim.lsp.util.make_position_params(0, "utf-16"))
  result.completion = vim.tbl_map(function(item) return item.label end, list.items or list)
  vim.api.nvim_buf_set_lines(0, -4, -1, false, {})

  vim.api.nvim_buf_set_lines(0, 0, 1, false, { "param   speed=0.1" })
  vim.lsp.buf.format()
  result.formatted = vim.api.nvim_buf_get_lines(0, 0, 1, false)[1]
  result.symbols = #ask("textDocument/documentSymbol", { textDocument = vim.lsp.util.make_text_document_params(0) })
end

local ok, message = xpcall(run, debug.traceback)
if not ok then
  result.error = message
end
io.stdout:write(vim.json.encode(result) .. "\n")
vim.cmd("qall!")
