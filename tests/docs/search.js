// Ask the built site's own search, as the browser's search box does.
//
//   node search.js SITE QUESTION ...
//
// prints a table: for each question the found pages, each a list of its found sections, best first.

const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [site, ...questions] = process.argv.slice(2);
const folder = path.join(site, "assets/javascripts/workers");
const [worker] = fs.readdirSync(folder).filter((name) => /^search\..*\.js$/.test(name));
const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"));

// The worker talks by messages. Type 0 gives it the index, type 2 is a question.
let handle, answered;
const scope = {
  console,
  addEventListener: (_, listener) => (handle = listener),
  postMessage: (message) => answered(message.data),
};
scope.self = scope;
vm.runInNewContext(fs.readFileSync(path.join(folder, worker), "utf8"), scope);

function send(type, data) {
  return new Promise((resolve) => {
    answered = resolve;
    handle({ data: { type, data } });
  });
}

async function main() {
  await send(0, { ...index, options: { suggest: false } });
  const found = {};
  for (const question of questions) {
    const { items } = await send(2, question);
    found[question] = items.map((sections) => sections.map((section) => section.location));
  }
  console.log(JSON.stringify(found));
}

main();
