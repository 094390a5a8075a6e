// Starts `dslc lsp` for the jobs that are open, and says how to install it where it is missing.
const vscode = require("vscode");
const { LanguageClient, TransportKind } = require("vscode-languageclient/node");

let client;

async function start() {
  const folder = vscode.workspace.workspaceFolders?.[0]?.uri.fsPath ?? "";
  const setting = vscode.workspace.getConfiguration("dslc").get("command", "dslc");
  const command = setting.replaceAll("${workspaceFolder}", folder);
  const server = { command, args: ["lsp"], transport: TransportKind.stdio };
  client = new LanguageClient("dslc", "dslc", server, { documentSelector: [{ language: "plt" }] });
  try {
    await client.start();
  } catch (error) {
    const remedy = "Install it by `pip install 'dslc[lsp]'`, or name the command in the setting dslc.command.";
    vscode.window.showErrorMessage(`\`${command} lsp\` does not start: ${error.message}. ${remedy}`);
  }
}

async function stop() {
  const running = client;
  client = undefined;
  if (running?.isRunning()) await running.stop();
}

async function activate(context) {
  const restart = async (event) => {
    if (!event.affectsConfiguration("dslc.command")) return;
    await stop();
    await start();
  };
  context.subscriptions.push(vscode.workspace.onDidChangeConfiguration(restart));
  await start();
}

module.exports = { activate, deactivate: stop };
